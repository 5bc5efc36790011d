import sys,time,resource
sys.path[:0]=['/work/main/tests/programs','/work/main/tests','/work/main']
import fault_jobs, fault_forks, faults
from fault_jobs import *
def cpu():
    r=resource.getrusage(resource.RUSAGE_CHILDREN); return r.ru_utime+r.ru_stime
def own():
    return time.process_time()
def test_it(tmp_path):
    lab=Lab(tmp_path)
    def timed(name, f):
        def g(*a,**k):
            t,c,o=time.time(),cpu(),own(); r=f(*a,**k); print(name, 'wall %.2f children %.2f own %.2f'%(time.time()-t,cpu()-c,own()-o), file=sys.__stderr__); return r
        return g
    fault_jobs.parts=timed('parts',fault_jobs.parts)
    lab.place=timed('place',lab.place)
    S=fault_forks.Started
    S.ending=timed('ending',S.ending); S.kill=timed('kill',S.kill); S._end=timed('_end',S._end)
    for n in ('training','evaluation'):
        print(faults.kills(lab, JOBS[n], 2), file=sys.__stderr__)
